"""The model of kernels, on a program that is counted by hand."""

import pytest

from examples.benchmarks import hlo_cost, roofline
from tests.examples.benchmarks.test_hlo_cost import FUSION
from tests.examples.benchmarks.test_program import NOTED, loop

FORWARD = (
    "ENTRY %main (q: bf16[8,1024,12,64]) -> bf16[8,12,1024,64] {\n"
    "  %q = bf16[8,1024,12,64]{3,2,1,0} parameter(0)\n"
    "  ROOT %o = bf16[8,12,1024,64]{3,1,2,0} custom-call(%q, %q, %q), "
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"x": '
    '{"intermediate_tensor_shape": {"element_type": "BF16", '
    '"dimensions": ["8", "12", "1024", "1024"]}}}\n}\n'
)
BACKWARD = FORWARD.replace("fmhaSoftmax", "fmhaSoftmaxBackward")


@pytest.mark.parametrize("text, products", [(FORWARD, 2), (BACKWARD, 5)])
def test_attention_counts_as_products(text, products):
    [kernel] = hlo_cost.kernels(text)
    assert kernel.flops == products * 2 * 8 * 12 * 1024 * 1024 * 64
    assert kernel.nbytes == 4 * 2 * 8 * 1024 * 12 * 64
    assert kernel.seconds == pytest.approx(2e-6 + kernel.flops / 650e12)


CUBLAS = (
    "ENTRY %main (x: f16[6,32,16], c: f16[6,32,32]) -> f16[6,32,32] {\n"
    "  %x = f16[6,32,16]{2,1,0} parameter(0)\n"
    "  %c = f16[6,32,32]{2,1,0} parameter(1)\n"
    "  ROOT %out = (f16[6,32,32]{2,1,0}, s8[4096]{0}) custom-call(%x, %x, %c), "
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"alpha_real":-0.5,"beta":BETA,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["2"]}}}\n}\n'
)


def test_products_of_cublas_and_what_they_add():
    [alone], [added] = (hlo_cost.kernels(CUBLAS.replace("BETA", x)) for x in "01")
    assert added.flops == alone.flops == 2 * 6 * 32 * 32 * 16
    assert added.adds and not alone.adds


def test_a_loop_and_a_fusion():
    [start, *body] = hlo_cost.kernels(loop(noted=NOTED))
    assert [kernel.times for kernel in (start, *body)] == [1, 7, 7, 7]
    [fused] = hlo_cost.kernels(FUSION)
    assert fused.flops == 2 * 4 * 16 * 32
    assert fused.seconds == pytest.approx(2e-6 + fused.nbytes / 2.9e12)


def test_the_report_names_the_dearest_and_the_largest_first(tmp_path, capsys):
    path = tmp_path / "program.txt"
    path.write_text(loop(noted=NOTED))
    assert roofline.main([str(path)]) == 0
    found = capsys.readouterr().out
    assert "22 kernels" in found
    dearest, largest = (
        part.splitlines()[2] for part in found.split("| ms |")[1].split("| MB |")
    )
    assert dearest.startswith("| 0.01 | 7 |")
    assert largest == "| 0.0 | f32[8, 128] | 1 |"
