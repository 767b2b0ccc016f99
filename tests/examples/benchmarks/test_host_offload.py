"""Copies between the host's memory and the device's, read off a compiled program."""

from examples.benchmarks.host_offload import Transfer, transfers

PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[8,4], w: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0:T(8,128)S(5)} parameter(0)
  %w = f32[8,4]{1,0:T(8,128)} parameter(1)
  %copy-start = (f32[8,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)
  %fusion.1 = f32[8,4]{1,0:T(8,128)} fusion(%w), kind=kLoop, calls=%f
  %fusion.2 = f32[8,4]{1,0:T(8,128)} fusion(%fusion.1), kind=kLoop, calls=%f
  %copy-done = f32[8,4]{1,0:T(8,128)} copy-done(%copy-start)
  %copy-start.1 = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %copy-done.1 = f32[8,4]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %fusion.3 = f32[8,4]{1,0:T(8,128)} fusion(%copy-done, %fusion.2), kind=kLoop, calls=%f
  %copy-start.2 = (f32[8,4]{1,0:T(8,128)S(5)}, f32[8,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%fusion.3)
  ROOT %copy-done.2 = f32[8,4]{1,0:T(8,128)S(5)} copy-done(%copy-start.2)
}
"""  # noqa: E501


def test_copies_are_those_from_and_to_the_host():
    assert transfers(PROGRAM) == [
        Transfer(nbytes=128, inward=True, kernels=2),
        Transfer(nbytes=128, inward=False, kernels=0),
    ]
