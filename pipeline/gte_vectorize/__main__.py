"""`python -m gte_vectorize` is the command."""

from gte_vectorize.cli import main

if __name__ == "__main__":
    main()
