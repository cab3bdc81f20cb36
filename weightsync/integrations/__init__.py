"""Our schemes under the names and protocols of the frameworks people already run."""
