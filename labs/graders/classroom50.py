"""Turn a report of labs/run.py --json into Classroom 50's result.json: classroom50.py REPORT"""

import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text())
tests = [
    {"name": one["name"], "score": int(one["passed"]), "max_score": 1, "output": one["text"]}
    for one in report["checks"]
    if one["passed"] is not None  # not tried here
]
result = {"score": sum(t["score"] for t in tests), "max_score": len(tests), "tests": tests}
Path("result.json").write_text(json.dumps(result, indent=1) + "\n")
