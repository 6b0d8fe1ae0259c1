"""`python -m tilewright`: the same as `tilewright`."""

from tilewright.cli.main import main

if __name__ == "__main__":
    main()
