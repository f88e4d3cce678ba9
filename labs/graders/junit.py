"""Turn a report of labs/run.py --json into JUnit XML, for GitLab and Jenkins: junit.py REPORT"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

report = json.loads(Path(sys.argv[1]).read_text())
suite = Xml.Element("testsuite", name=report["lab"], time=str(report["seconds"]))
for one in report["checks"]:
    case = Xml.SubElement(suite, "testcase", classname=report["lab"], name=one["name"])
    if not one["passed"]:
        kind = "skipped" if one["passed"] is None else "failure"
        Xml.SubElement(case, kind, message=one["text"])
Xml.ElementTree(suite).write("junit.xml", encoding="utf-8", xml_declaration=True)
