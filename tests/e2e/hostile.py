"""Sends a server any values in any fields, counts the statuses, and ends with 1 where one is the server's fault.

    python -m tests.e2e.hostile --requests 10000 --kv-offloading-size 0.1

Other flags are those of `routed-experts serve`. At the end a plain request must get its exact answer and rows, which
transformers computes from the same weights.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.contract.hostile import Hostile, check_response
from tests.e2e.harness import ASK, ON_GPU, SMALL_KV, Oracle, Server, answer_of, check, prompt_of, serving, vllm_fails
from tests.e2e.offload_on_cpu import kv_transfer_config

LIMIT_S = 60
FLAGS = (*SMALL_KV, "--block-size", "32", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
FLAGS += ("--max-model-len", "512", "--enable-scale-out")


def send(server: Server, count: int, number: int) -> tuple[Counter[str], list[str]]:
    """Sends so many requests, others for each `number`; gives how many had each status, and what was wrong."""
    info = server.info()
    statuses: Counter[str] = Counter()
    wrong: list[str] = []
    own = settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    own = settings(own, suppress_health_check=list(HealthCheck))

    with server.client() as client:

        @seed(number)
        @own
        @given(Hostile((info["num_layers"], info["top_k"])).requests())
        def each(asked: tuple[str, dict[str, Any]]) -> None:
            path, body = asked
            if sum(statuses.values()) >= count:
                return
            content = json.dumps(body)  # with NaN, integers of any size and lone surrogates
            headers = {"Content-Type": "application/json"}
            try:
                response = client.post(path, content=content, headers=headers, timeout=LIMIT_S)
                statuses[str(response.status_code)] += 1
                check_response(response)
            except httpx.HTTPError as error:
                statuses[type(error).__name__] += 1
                wrong.append(f"{error!r} after {path} {content}")
            except (AssertionError, KeyError, ValueError) as error:
                if not vllm_fails(server, path, body):
                    wrong.append(f"{error!r} after {path} {content}")

        each()
    return statuses, wrong


def check_alive(server: Server, oracle: Oracle) -> None:
    """That a request of a new prompt gets its exact answer."""
    body = {**ASK, "prompt": prompt_of(40, time.monotonic_ns()), "max_tokens": 5, "ignore_eos": True}
    check(answer_of(server.complete(**body)), oracle)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-offloading-size", type=float, help="GiB; on a CPU with the worker of the tests")
    args, flags = parser.parse_known_args(argv)
    if args.kv_offloading_size and ON_GPU:
        flags += ["--kv-offloading-size", str(args.kv_offloading_size)]
    elif args.kv_offloading_size:  # vLLM refuses it there
        flags += ["--kv-transfer-config", json.dumps(kv_transfer_config(int(args.kv_offloading_size * (1 << 30))))]
    with TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        make_tiny_model(model)
        with serving(model, Path(directory) / "log", *FLAGS, *flags) as server:
            statuses, wrong = send(server, args.requests, args.seed)
            print(", ".join(f"{count} x {status}" for status, count in statuses.most_common()))
            for each in wrong:
                print(each[:4000])
            check_alive(server, Oracle(model))
            print("The engine is alive, and its answer is exact.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
