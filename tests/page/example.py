"""Makes the example of the page, two responses of the tiny model: python -m tests.page.example"""

import json
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

import routed_experts.server.page as page
from routed_experts.protocol.saved import ModelInfo, page_lines
from routed_experts.server.cli.tiny_model import make_tiny_model, make_tokenizer
from tests.contract.served import serving_weights
from tests.e2e.harness import ASK, Server
from tests.page.screenshots import KV

PATH = Path(page.__file__).parent / "static" / "example.json"
PROMPTS = (
    "The router sends every token to a few of its experts, and some of them read prose.",
    "def route(token):\n    scores = softmax(gate @ token)\n    return top_k(scores, k=4)\n",
)


def response(server: Server, prompt: str) -> dict[str, Any]:
    """A response with weights, the texts of all tokens, and what is known of the model."""
    said = {
        **ASK,
        "return_routed_expert_weights": True,
        "routed_experts_dtype": "uint8",
        "temperature": 1,
        "seed": 1,
    }
    said["ignore_eos"] = True
    body = server.complete(model="tiny", prompt=prompt, max_tokens=48, logprobs=0, **said)
    (choice,), known = body["choices"], ModelInfo.__dataclass_fields__
    choice["logprobs"]["tokens"][:0] = [
        make_tokenizer().decode([one]) for one in choice["prompt_token_ids"]
    ]
    choice["logprobs"].pop("token_logprobs")
    return {
        **body,
        "routed_experts_info": {
            name: value for name, value in server.info().items() if name in known
        },
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_model(Path(directory))
        with serving_weights(
            Path(directory),
            "--dtype",
            "float32",
            "--enforce-eager",
            "--enable-return-routed-expert-weights",
            *KV,
        ) as server:
            bodies = "".join(f"{json.dumps(response(server, prompt))}\n" for prompt in PROMPTS)
            PATH.write_text("".join(page_lines([(PATH.name, StringIO(bodies))], ModelInfo())))
