"""How the programs `check_*.py` end."""

import sys


def end(failures):
    """Prints each failure and the verdict; exit code 1 where there is a failure, else 0."""
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    print("failed" if failures else "good")
    sys.exit(1 if failures else 0)
