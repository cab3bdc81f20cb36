"""Which releases of vLLM have what weightsync relies on: ``make compat``.

``table`` says what that is, ``sources`` finds it in a release's Python files without importing
them, ``check`` compares the two, ``wheels`` gets releases and ``trial`` runs tests on one.
"""
