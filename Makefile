# make tour     install into .venv what is needed, run every rung on this machine, compare the numbers
# make check    after a change of a rung: the contract, the budgets, the documents
#               (tests/test_contract.py, test_budgets.py and test_docs.py, without what is slow in them)
# make test     the same installation, then the whole test suite
# make figures  draw the figures of the READMEs again, from results/
# make readme   write the diffs and tables of the README again, from the files and from results/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: tour check test figures readme clean

tour: $(INSTALLED)
	$(BIN)/python benchmarks/tour.py

check: $(INSTALLED)
	$(BIN)/python -m pip install -q -r requirements-extras.txt
	$(BIN)/python -m pytest -n 2 --dist load -m "not slow" -k "not commands_run" \
		tests/test_contract.py tests/test_budgets.py tests/test_docs.py

test: $(INSTALLED)
	$(BIN)/python -m pip install -q -r requirements-extras.txt
	$(BIN)/python -m pytest -n 2 --dist loadfile

figures: $(INSTALLED)
	$(BIN)/python notebooks/figures.py
	$(BIN)/python labs/bugs/figure.py

readme: $(INSTALLED)
	$(BIN)/python tests/readme.py --write

$(INSTALLED): requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements.txt
	touch $@

clean:
	rm -rf $(VENV) checkpoints
