"""Base class of the objects that vLLM calls as its auxiliary output connectors."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

# `__name__` begins with "routed_experts". A child of vLLM's logger, which is configured.
logger = init_logger(f"vllm.{__name__}")


class AuxOutputHooks:
    """Base of an object that vLLM calls as its auxiliary output connector: the *hooks* of a
    scheduler, a model runner, or an output.

    Newer versions of vLLM pass more arguments and call more methods, for example for
    log-probabilities. Methods ignore extra arguments, and unknown methods return None, which means
    that there is no such output.
    """

    def take_output(self, *args: Any, **options: Any) -> None:
        """Called for each request with new tokens. All of a message's outputs are given their rows
        at once later."""

    # The next three are called since vLLM 0.33. `ExternalKVTracker` limits loads earlier, when vLLM
    # asks the KV connector.

    def max_cache_hit(self, *args: Any, **options: Any) -> int | None:
        """Limit of tokens in a prefix hit; None is no limit, since rows live as long as the KV."""
        return None

    def cap_external_hit(
        self, request: Any, num_local: int, num_external: int, *more: Any, **options: Any
    ) -> int:
        """Limit of tokens to load."""
        return num_external

    def request_loading(self, *args: Any, **options: Any) -> None:
        """Called before an asynchronous load."""

    if not TYPE_CHECKING:  # so that the type checker finds wrong names

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__} has no {name}")
            logger.warning_once(
                "vLLM called the unknown method %s of its auxiliary output connector.", name
            )
            return lambda *args, **kwargs: None
