"""`python -m scalelong` is `scalelong`."""

from .cli import main

if __name__ == "__main__":
    main()
