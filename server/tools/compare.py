"""`routed-experts compare`: compares responses with a Hugging Face forward pass of the same
checkpoint.

The forward pass scores the same tokens. Where experts differ, the gap between their scores tells
whether rounding explains the difference.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from routed_experts.protocol.routing import RoutingError
from routed_experts.protocol.saved import ModelInfo, SavedAnswer, read
from routed_experts.server.cli.console import CommandError, say
from routed_experts.server.tools.differences import Comparison, table
from routed_experts.server.tools.reference import Reference
from routed_experts.server.tools.running import RunningServer, add_server_flags, bodies_of
from routed_experts.server.tools.saved import atomic_file, opened

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = (
    "Which experts does this token go to, and why?",
    "def fibonacci(n):",
    "Es war einmal ein König.",
)


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routed-experts compare",
        description="Compares the experts in responses with a Hugging Face forward pass of the same checkpoint. "
        "Exit status: 0 if they are equal or differ only in near-ties, 1 if they differ by more, 2 on error.",
    )
    parser.add_argument("model", help="checkpoint: a folder or a name on the Hugging Face Hub")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--answers",
        nargs="+",
        metavar="FILE",
        help="responses to requests with return_routed_experts and return_token_ids; - for standard input",
    )
    source.add_argument("--url", help="URL of a running server; sends requests to it")
    add_server_flags(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the forward pass (default float32)",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="device of the forward pass: cpu (default), cuda, cuda:1, or auto for several GPUs",
    )
    parser.add_argument(
        "--near-tie",
        type=float,
        help="maximum score gap of a near-tie, in standard deviations of the token's scores "
        "(default: the square root of the dtype's epsilon, 0.00035 in float32, 0.088 in bfloat16)",
    )
    parser.add_argument(
        "--json", type=Path, help="also write the results to this file; - for standard output only"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts compare`; returns the exit status."""
    args = parse(argv)
    to_stdout = str(args.json) == "-"
    with ExitStack() as stack:
        file = None
        if args.json is not None and not to_stdout:
            file = stack.enter_context(atomic_file(args.json, "--json"))
        report = compare(args)
        text = json.dumps(report, indent=1)
        if file is not None:
            file.write_text(text + "\n", encoding="utf-8")
    print(text if to_stdout else table(report))
    return 1 if report["total"]["other_rows"] else 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The results for the command line `args`."""
    from tqdm import tqdm

    server = RunningServer(args.url, args.api_key) if args.url else None
    sources: list[Any] = (
        bodies_of(args, PROMPTS) if server else list(read(opened(args.answers), ModelInfo()))
    )
    say(f"Loading {args.model}.")
    reference = Reference(args.model, args.dtype, args.device)
    comparison = Comparison(reference.layer_ids)
    for source in tqdm(sources, desc="comparing", unit=" responses", disable=None):
        answer = server.ask(*source) if server else source
        _compare_answer(answer, reference, comparison)
    if not sum(layer.rows for layer in comparison.layers):
        raise CommandError(
            f"Nothing to compare: all {comparison.missing} rows of {comparison.answers} responses are unknown."
        )
    near_tie = reference.epsilon**0.5 if args.near_tie is None else args.near_tie
    about = {"model": args.model, "dtype": args.dtype, "device": args.device}
    return {**about, **comparison.report(near_tie)}


def _compare_answer(answer: SavedAnswer, reference: Reference, comparison: Comparison) -> None:
    ids = tuple(reference.layer_ids)
    info = ModelInfo(len(ids), reference.top_k, reference.num_experts, ids)
    routings = answer.routings(info)
    with answer.located():
        if answer.info.layer_ids not in (None, ids):
            raise RoutingError(
                f"its MoE layers are decoder layers {list(answer.info.layer_ids)}, "
                f"but the checkpoint has {reference.layer_ids}"
            )
        for routing in routings:
            comparison.add(routing, *reference.run(routing))
