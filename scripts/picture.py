"""Take the picture of README: the page of `ckptkit verify` about a real model in which something is wrong.

    scripts/picture [FILE.png]

1. get SmolLM2-135M as a Hugging Face folder (made once, see smollm2.py), and convert it to MindSpore
2. exchange gate and up of one layer, as a wrong table would, and take away the manifest, which would tell
3. `ckptkit verify --level layers --html` it, from relative paths: no folder of this machine is in the picture
4. open the page in a headless Chromium (it must be installed), and take the picture

Exits with 1 when the verification does not find just that fault, or when there is no picture.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import smollm2

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGE = REPOSITORY / "docs" / "images" / "verify.png"
MOST_BYTES = 300_000  # it travels with every clone
LAYER = 11
HF, MINDSPORE, PAGE = "hub/SmolLM2-135M", "ms/smollm2-135m", "report.html"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1150",
    "--virtual-time-budget=6000",
)  # fmt: skip


def main() -> int:
    image = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else IMAGE
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("no Chromium is installed (Debian: apt-get install chromium)")
        return 1
    try:
        source = smollm2.ensure(smollm2.default_cache())
    except smollm2.NotAvailableError as error:
        print(error)
        return 1
    with tempfile.TemporaryDirectory(prefix="ckptkit-picture-") as name:
        room = Path(name)
        make_models(source, room)
        text = verified(room)
        if text is None:
            return 1
        image.parent.mkdir(parents=True, exist_ok=True)
        image.unlink(missing_ok=True)
        page = (room / PAGE).as_uri()
        command = [chromium, *FLAGS, f"--user-data-dir={room / 'chromium'}", f"--screenshot={image}", page]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return judge(image, done.stderr)


def make_models(source: Path, room: Path) -> None:
    """Put the model into `room`, and its conversion with gate and up of LAYER exchanged."""
    shutil.copytree(source, room / HF)
    run("convert", HF, MINDSPORE, "--to", "mindformers", room=room)
    (room / MINDSPORE / "ckptkit.json").unlink()
    file = room / MINDSPORE / "part0.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")  # of the tensors, after the header
    gate, up = (f'"model.layers.{LAYER}.feed_forward.{part}.weight"'.encode() for part in ("w1", "w3"))
    header = data[8:start].replace(gate, b'"gate"').replace(up, gate).replace(b'"gate"', up)
    assert header != data[8:start] and len(header) == start - 8
    file.write_bytes(data[:8] + header + data[start:])


def verified(room: Path) -> str | None:
    """Verify and return the page; None when it does not tell of that fault alone, or tells where it was made."""
    done = run("verify", HF, MINDSPORE, "--level", "layers", "--runner", "builtin", "--html", PAGE, room=room)
    print(done.stdout, end="")
    text = (room / PAGE).read_text() if (room / PAGE).is_file() else ""
    right = done.returncode == 1 and f"layers.{LAYER}.mlp" in done.stdout and "exchanged" in done.stdout
    if right and str(room) not in text:
        return text
    print(f"the page is not as it must be (exit code {done.returncode}): {done.stderr}")
    return None


def run(*words: str, room: Path) -> subprocess.CompletedProcess[str]:
    """Run ckptkit in `room`; without a terminal, it draws no progress bar."""
    return subprocess.run([sys.executable, "-m", "ckptkit", *words], cwd=room, capture_output=True, text=True)


def judge(image: Path, said: str) -> int:
    if not image.is_file():
        print(f"Chromium made no picture:\n{said[-2000:]}")
        return 1
    size = image.stat().st_size
    print(f"{image.name}: {size} bytes{f', more than {MOST_BYTES}' if size > MOST_BYTES else ''}")
    return 1 if size > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
