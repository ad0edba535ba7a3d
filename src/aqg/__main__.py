"""The command ``aqg``; also ``python -m aqg``."""

import sys


def main() -> None:
    """Run the command line, and turn every expected failure into one line and exit code 2."""
    try:
        from aqg.cli.app import run_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "aqg":
            raise
        sys.exit(f"aqg: error: {error.name} is missing; install with: pip install 'aqg[sim]'")
    sys.exit(run_app(sys.argv[1:]))


if __name__ == "__main__":
    main()
