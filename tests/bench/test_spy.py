"""Whose a sample of the event loop is."""

from pathlib import Path

from bench.spy import shares

_LOOP = "run (asyncio/runners.py:118)"
_VLLM = "generate (vllm/v1/engine/async_llm.py:500)"


def test_samples_of_ours_are_found_in_a_checkout_and_where_the_package_is_installed(
    tmp_path: Path,
) -> None:
    """A function of no package, as numpy's, counts for the one that called it."""
    in_checkout = f"Runner.{_LOOP};{_VLLM};rewrite (server/http/answers/streaming.py:320)"
    installed = (
        f"Runner.{_LOOP};{_VLLM};rewrite (routed_experts/server/http/answers/streaming.py:320)"
    )
    by_whole_path = f"Runner.{_LOOP};_unpack (/a/routed_experts/capture/wire/envelope.py:204)"
    of_ours = f"{in_checkout};take (numpy/fromnumeric.py:10)"
    elsewhere = f"Runner.{_LOOP};serve (vllm/server/api.py:1)"
    other_thread = "put (server/outputs/array_store.py:1)"
    samples = {
        in_checkout: 1,
        installed: 2,
        by_whole_path: 4,
        of_ours: 8,
        f"Runner.{_LOOP};{_VLLM}": 16,
        elsewhere: 32,
        other_thread: 64,
    }
    file = tmp_path / "samples"
    file.write_text("".join(f"{stack} {count}\n" for stack, count in samples.items()))

    packages, functions = shares(file)

    assert packages == {"routed_experts": 15, "vllm": 48}
    assert functions == {"rewrite": 3, "_unpack": 4}
