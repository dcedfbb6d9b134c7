"""Print what `import hfaccel` adds to `from transformers import LlamaForCausalLM`, each in a new process.

python scripts/import_cost.py [runs]
"""

import statistics
import subprocess
import sys

CODE = (
    "import time\n"
    "from transformers import LlamaForCausalLM\n"
    "start = time.perf_counter()\n"
    "import hfaccel\n"
    "print(time.perf_counter() - start)"
)

runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
seconds = [
    float(subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout)
    for _ in range(runs)
]
low, high = min(seconds), max(seconds)
print(f"import hfaccel: {statistics.median(seconds):.3f} s (median of {runs}, {low:.3f} to {high:.3f})")
