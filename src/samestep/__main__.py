"""`python -m samestep`, which is also what torchrun starts."""

from samestep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
