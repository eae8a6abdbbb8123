# SPDX-License-Identifier: Apache-2.0
"""Write docs/models: one page for each model_type, from measurements of this command.

python -m tools.model_cards verify build/cards.json                  all model types
python -m tools.model_cards verify build/cards.json --only olmo3     replaces its cards
python -m tools.model_cards write build/cards.json                   the pages and the index

`verify` needs transformers. For each model type it makes a small random model by transformers and
compares logits, the gradient of every parameter, exported files, greedy tokens, the losses of each
layout, and the parameter counts of published models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from megatron.hf.architectures import ARCHITECTURES
from tools.model_cards.pages import write_pages
from tools.model_cards.verify import verify


def main(words: list[str] | None = None) -> int:
    """Run a command and return the exit code: 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tools.model_cards", description=__doc__)
    parser.add_argument("command", choices=["verify", "write"])
    parser.add_argument("cards", type=Path, help="JSON file of the measurements")
    parser.add_argument("--only", nargs="+", choices=sorted(ARCHITECTURES), default=None)
    options = parser.parse_args(words)
    cards = json.loads(options.cards.read_text()) if options.cards.exists() else {}
    if options.command == "write":
        write_pages(cards)
        return 0
    wrong = 0
    for model_type in options.only or sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as folder:
            card = verify(model_type, Path(folder))
        cards[model_type] = card
        wrong += len(card["problems"])
        print(model_type, json.dumps(card), flush=True)
        options.cards.parent.mkdir(parents=True, exist_ok=True)
        options.cards.write_text(json.dumps(cards, indent=1, sort_keys=True) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
