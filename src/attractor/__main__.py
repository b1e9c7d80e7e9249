"""`python -m attractor` is the command `attractor`."""

from attractor.cli import main

if __name__ == "__main__":
    main()
