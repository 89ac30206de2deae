"""Starts the ``consilium`` command, and prints one line if Ctrl-C stops it while its modules load."""

import sys


def main() -> None:
    """Run the command line; end with exit code 130 if Ctrl-C comes before or after the command itself."""
    try:
        from consilium.cli.main import main as run  # takes a second on a busy machine

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
