"""``python -m moeloom``."""

from moeloom.cli import main

if __name__ == "__main__":
    main()
