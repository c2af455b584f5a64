"""Records what Transformers computes in float32, so that machines without torch can compare.

    python scripts/make_reference.py MODEL OUT      one model, into the folder OUT
    python scripts/make_reference.py --goldens      everything under tests/golden

What is written is described at `record` in pyengine/evidence/reference.py. The goldens are thinned
to every 8th position and some columns, because all data of the project has to stay small.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer  # noqa: E402  (needs the path above)

from pyengine.evidence.prompts import Prompt, context_of, make_prompts, switch_lengths  # noqa: E402
from pyengine.evidence.reference import TransformersReference, record  # noqa: E402

GREEDY_TOKENS = 48
GREEDY_PROMPT = "And God said"
CHECKPOINT_GOLDEN = {"positions": 1000, "row_stride": 8, "column_stride": 32}
TINY_GOLDEN = {"positions": 256, "row_stride": 8, "column_stride": 8}


def read_prompts(model: Path, positions: int | None) -> list[Prompt]:
    """The built-in prompts in the model's tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    return make_prompts(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        max_tokens=context_of(config),
        positions=positions,
        exact=switch_lengths(config),
    )


def greedy_text(reference: TransformersReference, model: Path) -> dict[str, Any]:
    """One continuation by greatest logit, none of whose steps was a near tie."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt_ids = tokenizer.encode(GREEDY_PROMPT, add_special_tokens=True).ids
    ids, lead = reference.greedy(prompt_ids, GREEDY_TOKENS)
    if lead < 1e-3:
        raise SystemExit(f"{model}: choose another greedy prompt (smallest lead {lead:.1e})")
    return {
        "prompt": GREEDY_PROMPT,
        "prompt_ids": prompt_ids,
        "ids": ids,
        "text": tokenizer.decode([*prompt_ids, *ids])[len(tokenizer.decode(prompt_ids)) :],
        "smallest_lead": lead,
    }


def make(
    model: Path,
    out: Path,
    *,
    name: str,
    positions: int | None,
    row_stride: int,
    column_stride: int,
    untrained: bool,
    device: str,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Records one model."""
    reference = TransformersReference(
        model,
        read_prompts(model, positions),
        untrained=untrained,
        row_stride=row_stride,
        column_stride=column_stride,
        device=device,
    )
    greedy = {} if untrained else {"greedy": greedy_text(reference, model)}
    record(reference, out, {"model": name, **greedy, **(extra or {})})
    size = sum(file.stat().st_size for file in out.iterdir())
    tokens = sum(len(prompt.ids) for prompt in reference.prompts)
    loss = reference.info["loss_nats"]
    print(f"{out}: {tokens} positions, {size} bytes, loss {loss and round(loss, 2)}", flush=True)


def make_goldens(only: list[str], device: str) -> None:
    """Every trained checkpoint and every tiny variant of the tests."""
    from tests.conftest import CHECKPOINTS, GOLDEN
    from tests.tiny import VARIANTS, write_tiny

    for name, model in CHECKPOINTS.items():
        if not only or name in only:
            out = GOLDEN / name
            make(model, out, name=name, untrained=False, device=device, **CHECKPOINT_GOLDEN)
    for name in VARIANTS:
        if not only or name in only:
            with tempfile.TemporaryDirectory() as folder:
                model = write_tiny(name, folder)
                out = GOLDEN / f"tiny-{name}"
                make(model, out, name=name, untrained=True, device=device, **TINY_GOLDEN)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path, nargs="?", help="a Hugging Face directory")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--goldens", action="store_true", help="remake tests/golden")
    parser.add_argument("--only", nargs="*", default=[], help="with --goldens: these names")
    parser.add_argument("--positions", type=int, help="at most this many in total (default: all)")
    parser.add_argument("--row-stride", type=int, default=1, help="keep every n-th position")
    parser.add_argument("--column-stride", type=int, default=1, help="keep every n-th logit")
    parser.add_argument("--untrained", action="store_true", help="random weights: no loss check")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    args = parser.parse_args()
    if args.goldens:
        make_goldens(args.only, args.device)
    elif args.model is None or args.out is None:
        parser.error("MODEL and OUT, or --goldens")
    else:
        make(
            args.model,
            args.out,
            name=args.model.name,
            positions=args.positions,
            row_stride=args.row_stride,
            column_stride=args.column_stride,
            untrained=args.untrained,
            device=args.device,
        )


if __name__ == "__main__":
    main()
