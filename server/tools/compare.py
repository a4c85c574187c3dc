"""`routed-experts compare`: compares responses with a Hugging Face forward pass of the same
checkpoint, or with others.

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
from routed_experts.server.cli.console import CommandError, Parser, say
from routed_experts.server.tools.differences import Comparison, table
from routed_experts.server.tools.forced import compare_forced, forced_table
from routed_experts.server.tools.reference import Reference
from routed_experts.server.tools.running import (
    Body,
    RunningServer,
    Source,
    add_server_flags,
    bodies_of,
)
from routed_experts.server.tools.saved import add_flags, atomic_file, info_of, opened

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = (
    "Which experts does this token go to, and why?",
    "def fibonacci(n):",
    "Es war einmal ein König.",
)


# ---- the command ----


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="routed-experts compare",
        description="Compares the experts in responses with a Hugging Face forward pass of the same checkpoint, or "
        "with those in other responses to the same prompts. Exit status: 0 if they are equal or differ only in "
        "near-ties, 1 if they differ by more, 2 on error.",
    )
    parser.add_argument(
        "model",
        help="checkpoint: a folder or a name on the Hugging Face Hub; or a file with responses to the same prompts, in "
        "the same order: they are compared as far as their tokens are the same; with --force, the URL of a server",
    )
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
        "--weights",
        action="store_true",
        help="compare the router's weights too, where both sides chose the same expert; needs "
        "return_routed_expert_weights in the requests",
    )
    parser.add_argument(
        "--logprobs",
        action="store_true",
        help="compare the log-probabilities of tokens too: mean and tails of the absolute difference, for tokens with "
        "equal and with different rows; needs logprobs in the requests",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="MODEL is the URL of a server with --enable-routed-experts-input: says how much of the difference between "
        "its log-probabilities and those of the responses is that its routers choose other experts; needs logprobs "
        "and return_token_ids in the requests",
    )
    parser.add_argument(
        "--json", type=Path, help="also write the results to this file; - for standard output only"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.force and args.url:
        parser.error("--force compares --answers with the server that is named in place of a model")
    return args


def main(argv: Sequence[str]) -> int:
    """Runs `routed-experts compare`; returns the exit status."""
    args = parse(argv)
    to_stdout = str(args.json) == "-"
    with ExitStack() as stack:
        file = None
        if args.json is not None and not to_stdout:
            file = stack.enter_context(atomic_file(args.json, "--json"))
        report = compare_forced(args) if args.force else compare(args)
        text = json.dumps(report, indent=1)
        if file is not None:
            file.write_text(text + "\n", encoding="utf-8")
    as_text = forced_table if args.force else table
    print(text if to_stdout else as_text(report))
    has_other_rows = not args.force and report["total"]["other_rows"]
    return 1 if has_other_rows else 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The results for the command line `args`."""
    is_file = Path(args.model).is_file()
    if is_file and args.url:
        raise CommandError(f"{args.model} is a file of responses: compare it with --answers.")
    near_tie, comparison = _compare_files(args) if is_file else _compare_checkpoint(args)
    report = comparison.report(near_tie)
    if not report["total"]["rows"] and not report.get("logprobs", {}).get("all", {}).get("tokens"):
        missing = report["missing_rows"]
        raise CommandError(
            f"Nothing to compare: all {missing} rows of {report['answers']} responses are unknown."
        )
    forward_pass = {} if is_file else {"dtype": args.dtype, "device": args.device}
    return {"model": args.model, **forward_pass, **report}


def _compare_checkpoint(args: argparse.Namespace) -> tuple[float | None, Comparison]:
    """The gap of a near-tie, and the comparison."""
    from tqdm import tqdm

    server = RunningServer(args.url, args.api_key) if args.url else None
    sources: list[Any] = (
        _bodies(args) if server else list(read(opened(args.answers), info_of(args)))
    )
    if server:
        server.check_prompts(sources)
    say(f"Loading {args.model}.")
    reference = Reference(args.model, args.dtype, args.device)
    if args.weights and not reference.has_weights:
        raise CommandError(
            f"The routers of {args.model} in transformers do not return their weights."
        )
    comparison = Comparison(reference.layer_ids, args.weights, args.logprobs)
    for source in tqdm(sources, desc="comparing", unit=" responses", disable=None):
        answer = server.ask(source[0], source[1], args.weights) if server else source
        routings = answer.routings(_info_of(reference))
        with answer.located():
            _check_layers(answer.info, reference)
            for ours in routings:
                theirs, gaps = reference.run(ours, args.logprobs)
                comparison.add(ours, theirs, (answer.info.weights_scale, None), gaps)
    return reference.epsilon**0.5 if args.near_tie is None else args.near_tie, comparison


def _compare_files(args: argparse.Namespace) -> tuple[None, Comparison]:
    """No near-ties, as responses have no scores, and the comparison."""
    all_ours = list(read(opened(args.answers), info_of(args)))
    all_theirs = list(read(opened([args.model]), info_of(args)))
    if len(all_ours) != len(all_theirs):
        raise CommandError(
            f"--answers has {len(all_ours)} responses, but {args.model} has {len(all_theirs)}."
        )
    comparison: Comparison | None = None
    for ours, theirs in zip(all_ours, all_theirs, strict=True):
        our_choices = ours.routings()
        their_choices = theirs.routings()
        with ours.located():
            if comparison is None:
                layers = range(our_choices[0].rows.shape[1])
                layer_ids = ours.info.layer_ids or theirs.info.layer_ids or layers
                comparison = Comparison(layer_ids, args.weights, args.logprobs)
            _check_same_layers(ours, theirs)
            if len(our_choices) != len(their_choices):
                raise RoutingError(
                    f"{len(our_choices)} choices, but {len(their_choices)} in {theirs.where}"
                )
            scales = (ours.info.weights_scale, theirs.info.weights_scale)
            for our_choice, their_choice in zip(our_choices, their_choices, strict=True):
                comparison.add(our_choice, their_choice, scales)
    assert comparison is not None
    return None, comparison


def _check_same_layers(ours: SavedAnswer, theirs: SavedAnswer) -> None:
    our_ids = ours.info.layer_ids
    their_ids = theirs.info.layer_ids
    if our_ids is not None and their_ids is not None and our_ids != their_ids:
        raise RoutingError(
            f"its MoE layers are decoder layers {our_ids}, but those of {theirs.where} are {their_ids}"
        )


def _info_of(reference: Reference) -> ModelInfo:
    layer_ids = tuple(reference.layer_ids)
    return ModelInfo(len(layer_ids), reference.top_k, reference.num_experts, layer_ids)


def _check_layers(info: ModelInfo, reference: Reference) -> None:
    if info.layer_ids not in (None, tuple(reference.layer_ids)):
        ids = list(info.layer_ids or ())
        raise RoutingError(
            f"its MoE layers are decoder layers {ids}, but the checkpoint has {reference.layer_ids}"
        )


def _bodies(args: argparse.Namespace) -> list[tuple[Source, Body]]:
    """Source and request of each prompt."""
    bodies = bodies_of(args, PROMPTS)
    if not args.logprobs:
        return bodies
    return [
        (source, {**body, "logprobs": True if "messages" in body else 0}) for source, body in bodies
    ]
