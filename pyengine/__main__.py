"""`python -m pyengine`."""

from pyengine.cli import main

if __name__ == "__main__":
    main()
