"""``python -m paceline``: the command line."""

from paceline.tools.main import main

if __name__ == "__main__":
    main()
