"""The endpoint plugin that vLLM loads into its API process if VLLM_PLUGINS names it, with any
version of vLLM."""

from typing import TYPE_CHECKING, Any

from routed_experts.capture.engine.versions import (
    UnsupportedConfig,
    check_vllm_has,
    check_vllm_version,
)
from routed_experts.capture.seams.required import API, HTTP
from routed_experts.server import GO_BACK, PLUGIN_NAME

if TYPE_CHECKING:
    from routed_experts.server.http.process.plugin import RoutedExpertsPlugin


def make() -> "RoutedExpertsPlugin | UnavailablePlugin":
    """What vLLM calls. It logs what a plugin raises here and serves without it, so this does not
    raise."""
    try:
        check_vllm_version()
        check_vllm_has((*API, *HTTP))
    except UnsupportedConfig as error:
        return UnavailablePlugin(UnsupportedConfig(f"{error} {GO_BACK}"))
    try:
        from routed_experts.server.http.process.plugin import RoutedExpertsPlugin
    except Exception as error:  # noqa: BLE001 whatever it is ends the start, a few lines later
        return UnavailablePlugin(
            UnsupportedConfig(f"The plugin for vLLM cannot be loaded: {error!r}. {GO_BACK}")
        )
    return RoutedExpertsPlugin()


class UnavailablePlugin:
    """Ends the start of the server that names it: vLLM ignores unknown fields, and routing would be
    lost silently."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def __init__(self, error: UnsupportedConfig) -> None:
        self.error = error

    def attach_router(self, app: Any) -> None:
        raise self.error

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        raise self.error
