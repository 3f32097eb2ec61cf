"""Published environments of verifiers, and a tokenizer with tokens for their tool calls."""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.integrations.support import PYTHON

VERIFIERS = "0.4.0"
FIXTURES = "tests/v1/fixtures"
"""Folder of verifiers' source with the environments of its own end-to-end tests."""
CALL, CALL_END = "<tool_call>", "</tool_call>"
TOKENS = (CALL, CALL_END, "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of Qwen3's chat format that the tiny model's tokenizer lacks."""


def download_source(folder: Path) -> Path:
    """Download verifiers' source from PyPI and return its folder. Skip the test if the download fails."""
    command = [
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    done = subprocess.run(
        [PYTHON, "-m", "pip", *command, f"verifiers=={VERIFIERS}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no source of verifiers {VERIFIERS} from PyPI: {done.stderr.strip()[-200:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return folder / f"verifiers-{VERIFIERS}"


def teach_tool_calls(checkpoint: Path) -> None:
    """Add the tokens of tool calls to a tiny model's tokenizer, in place of its last tokens."""
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    first = len(model["vocab"]) - len(TOKENS)
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < first}
    # The last merges produce the replaced tokens, and no other merge uses them.
    model["merges"] = model["merges"][: -len(TOKENS)]
    for number, token in enumerate(TOKENS, first):
        model["vocab"][token] = number
        kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": number, "content": token, **kind})
    path.write_text(json.dumps(tokenizer))


def token_id(checkpoint: Path, token: str) -> int:
    """Return the id of one token of a tokenizer."""
    return int(json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"][token])
