"""Reloads of models of two sizes, each in a separate process.

Invariant: the models are the demo's, and one of the same family with 100M parameters.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).parents[1]
sys.path.insert(0, str(BENCH.parent / "examples" / "running_total"))

SMALL_REPEATS, LARGE_REPEATS = 40, 8


def bench_reload(large: bool) -> dict[str, float]:
    """Returns ratios and milliseconds; the names of those for 100M parameters begin with large_."""
    with tempfile.TemporaryDirectory() as folder:
        import prepare  # type: ignore[import-not-found]  # the example's, found at run time

        prepare.save_model(Path(folder) / "small", seed=0)
        found = _reload(Path(folder) / "small", SMALL_REPEATS)
        if large:
            _save_large(Path(folder) / "large")
            found |= {f"large_{name}": value for name, value in _reload(Path(folder) / "large", LARGE_REPEATS).items()}
    return found


def _reload(model: Path, repeats: int) -> dict[str, float]:
    command = [sys.executable, "-m", "weights_side.reload", str(model), str(repeats)]
    done = subprocess.run(command, cwd=BENCH, stdout=subprocess.PIPE, text=True, timeout=500, check=True)
    seconds = json.loads(done.stdout.splitlines()[-1])
    return {
        "bare_reload_ms": 1e3 * seconds["reload"],
        "vllm_reload_ms": 1e3 * seconds["vllm"],
        "copy_ms": 1e3 * seconds["copy"],
        "reload_vs_bytes": seconds["reload"] / seconds["copy"],
        "vllm_reload_vs_bytes": seconds["vllm"] / seconds["copy"],
        "reload_vs_vllm": seconds["reload"] / seconds["vllm"],
    }


def _save_large(folder: Path) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=8003,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        use_sliding_window=False,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
