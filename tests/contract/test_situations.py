"""Situations on the engine around arithmetic, each as short as `engine` lets a test be."""

from tests.contract.engine import Client, engine, tokens


def test_an_abort_in_the_prefill(is_async: bool) -> None:
    """What another request finds in the blocks that it left has its rows."""
    client = Client(engine(is_async, chunk=48))
    client.add("gone", tokens(150))
    client.steps(2)
    client.abort("gone")
    client.add("stays", tokens(150))
    client.finish(but="gone")


def test_a_prompt_that_is_longer_than_all_that_is_free(is_async: bool) -> None:
    client = Client(engine(is_async, num_blocks=12, chunk=48))
    client.add("runs", tokens(60), max_tokens=30)
    client.steps(5)
    client.add("waits", tokens(140, seed=1), n=2)
    client.finish()
