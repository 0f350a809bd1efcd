"""The version, where both the package and its parts can read it."""

VERSION = "0.1.0"
