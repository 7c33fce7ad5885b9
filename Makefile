# Everything runs in .venv, made from requirements.txt. PYTHON=python3.12 make test picks another interpreter.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
QUICK := --env cheetah-run --quick --data-dir data/quickstart

# Threads that wait for their turn in a loop would slow down whatever else runs on the machine, and be slowed down by it.
export OMP_WAIT_POLICY = passive

.PHONY: quickstart test lint clean

$(INSTALLED): requirements.txt requirements-videos.txt requirements-sam.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	SAM2_BUILD_CUDA=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -r requirements-sam.txt
	touch $@

quickstart: $(INSTALLED)
	$(BIN)/python make_dataset.py $(QUICK) --backgrounds synthetic --workers 2
	$(BIN)/python lapo.py $(QUICK)
	$(BIN)/python masklam.py $(QUICK)
	$(BIN)/python make_figures.py --compare runs/lapo/cheetah-run/quick/seed1 runs/masklam/cheetah-run/quick/seed1

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv data/quickstart runs/lapo/cheetah-run/quick runs/masklam/cheetah-run/quick
