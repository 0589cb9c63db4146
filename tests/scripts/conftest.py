"""Scripts are commands beside each other, not a package: import them as they import."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
