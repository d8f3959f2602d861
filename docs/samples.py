"""Start-up reports in the pages, printed by real runs: ``python docs/samples.py`` puts them where they go.

A page has ``<!-- sample: strategy -->`` before and ``<!-- end of sample -->`` after each.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"(<!-- sample: (\w+) -->\n).*?(<!-- end of sample -->)", re.DOTALL)
_RUN = """
import sys
import lightning as L, torch, lowbit_strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    x = torch.randn(128, 64)
    trainer = L.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.flip(1).tanh()), batch_size=32))
"""


def report(strategy: str) -> str:
    """The start-up report of two ranks under `strategy`, with one name for all sets of vector instructions."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "sample.py"
        script.write_text(_RUN, encoding="utf-8")
        command = [sys.executable, str(script), strategy]
        printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=280)
    found = re.search(r"^lowbit_strategy: compressed .*\n(?: .*\n)+", printed.stdout + printed.stderr, re.MULTILINE)
    if found is None:
        raise ValueError(f"{strategy} printed no report:\n{printed.stdout}{printed.stderr}")
    return re.sub(r"kernels: [^\n]*", "kernels: native C (avx512)", found[0])


def filled(text: str) -> str:
    """A page with its reports as runs print them now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n```text\n{report(found[2])}```\n\n{found[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
