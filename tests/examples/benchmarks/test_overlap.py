"""The reader of exposed collectives, on a program in which each kind stands once."""

import pytest

from examples.benchmarks import overlap

PROGRAM = """
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %first = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-to-all-start(%x), dimensions={0}
  %second = ((f32[8,8]{1,0}), f32[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %product = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  %one = f32[8,8]{1,0} all-to-all-done(%first)
  %two = f32[16,8]{1,0} all-gather-done(%second)
  %third = f32[8,8]{1,0} all-reduce-start(%product), to_apply=%sum
  %other = f32[8,8]{1,0} add(%one, %one)
  %three = f32[8,8]{1,0} all-reduce-done(%third)
  %four = f32[8,8]{1,0} all-to-all(%three), dimensions={0}
  %again = f32[8,8]{1,0} dot(%four, %x), lhs_contracting_dims={1}
  %five = f32[8,8]{1,0} fusion(%again), kind=kCustom, calls=%permuted
  ROOT %six = f32[8,8]{1,0} fusion(%five), kind=kLoop, calls=%copied
}
"""
FUSED = """
%permuted (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %own = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
  ROOT %r = f32[8,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

%copied (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  %all = f32[8,8]{1,0} all-reduce(%q), to_apply=%sum
  ROOT %c = f32[8,8]{1,0} copy(%all)
}
"""
BYTES, FLOPS = 4 * 64, 2 * 8**3


def test_products_between_start_and_done():
    found = list(overlap.collectives(FUSED + PROGRAM))
    assert found == [
        ("all-to-all", BYTES, FLOPS),
        ("all-gather", 2 * BYTES, FLOPS),
        ("all-reduce", BYTES, 0),
        ("all-to-all", BYTES, 0),
        ("collective-permute", BYTES, FLOPS),
        ("all-reduce", BYTES, 0),
    ]
    assert overlap.exposed_bytes(FUSED + PROGRAM) == 3 * BYTES


@pytest.mark.parametrize("times", [1, 5])
def test_a_loop_exposes_what_it_runs_as_often_as_it_runs(times):
    text = f"""
%body (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %r = f32[8,8]{{1,0}} all-to-all(%p), dimensions={{0}}
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %w = f32[8,8]{{1,0}} while(%x), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"{times}"}}}}
}}
"""  # noqa: E501
    assert overlap.exposed_bytes(text) == times * BYTES
