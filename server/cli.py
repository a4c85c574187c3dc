"""The command `routed-experts`: vLLM's `serve` with our plugin, worker and scheduler filled in."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

from routed_experts.server.errors import CommandError

PLUGIN_GROUP = "vllm.endpoint_plugins"
PLUGIN_NAME = "routed_experts"
SCHEDULER = "routed_experts.capture.engine.scheduler.make_scheduler"
WORKERS = {
    "cpu": "routed_experts.capture.engine.worker.CpuCaptureWorker",
    "cuda": "routed_experts.capture.engine.worker.CudaCaptureWorker",
}
TINY_MODEL_NAME = "tiny-moe"

USAGE = """\
usage: routed-experts serve [MODEL] [any flag of vllm serve]
       routed-experts tiny-model DIR

serve       vLLM's OpenAI-compatible server, which also returns the experts that every token was routed to.
            Without MODEL it serves a tiny model that it makes on the spot.
            --no-enable-return-routed-experts serves without the capture.
            --help=all lists every flag.
tiny-model  writes that tiny model to DIR: random weights, 16 experts, a few MB.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command."""
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    try:
        if command == "serve":
            serve(rest)
        elif command == "tiny-model":
            tiny_model(rest)
        elif command in ("-h", "--help", "help"):
            print(USAGE, end="")
        else:
            raise CommandError(f"{command} is not a command.\n\n{USAGE}")
    except CommandError as error:
        print(f"routed-experts: {error}", file=sys.stderr)
        return 2
    return 0


def tiny_model(argv: list[str]) -> None:
    """`routed-experts tiny-model DIR`"""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise CommandError("tiny-model takes one argument, the folder to write the model to.")
    from routed_experts.server.tiny_model import make_tiny_model  # imports transformers, which takes seconds

    make_tiny_model(Path(argv[0]))
    print(f"Wrote the tiny MoE model to {argv[0]}.")


def serve(argv: list[str]) -> None:
    """`routed-experts serve [MODEL] …`; returns when the server has stopped."""
    from routed_experts.server import launch  # imports vLLM, which takes seconds

    args = launch.parse(argv)
    if args.model_tag is None:
        launch.use_tiny_model(args, tiny_model_dir())
    capture = launch.take_capture_flag(args)
    allow_plugin()
    if capture:
        launch.fill_in(args, SCHEDULER, WORKERS)
        launch.check(args)
    launch.run(args)


def tiny_model_dir() -> Path:
    """Where the tiny model of the default lives: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "routed-experts" / TINY_MODEL_NAME


def allow_plugin() -> None:
    """Names our plugin in `VLLM_PLUGINS`, without which vLLM does not load it.

    The variable filters every group of plugins, so where it was not set, all that is installed stays allowed.

    Raises:
        CommandError: the plugin cannot be imported. vLLM would log that and serve without it.
    """
    plugins = entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not plugins:
        raise CommandError(
            "The package is not installed properly (its plugin for vLLM is not registered): reinstall it."
        )
    try:
        next(iter(plugins)).load()
    except Exception as error:
        raise CommandError(f"The plugin for vLLM cannot be loaded: {error!r}") from error
    given = os.environ.get("VLLM_PLUGINS")
    names = given.split(",") if given is not None else sorted(_other_plugins())
    os.environ["VLLM_PLUGINS"] = ",".join([*(name for name in names if name and name != PLUGIN_NAME), PLUGIN_NAME])


def _other_plugins() -> set[str]:
    """Every installed plugin of vLLM that loads without being named: endpoint plugins do not."""
    every = entry_points()
    groups = [group for group in every.groups if group.startswith("vllm.") and group != PLUGIN_GROUP]
    return {plugin.name for group in groups for plugin in every.select(group=group)}


if __name__ == "__main__":
    sys.exit(main())
