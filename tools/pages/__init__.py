"""What the built documentation needs besides mkdocs."""
