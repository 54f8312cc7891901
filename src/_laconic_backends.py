"""What torch calls at the end of `import torch` (entry point group `torch.backends`): `laconic.autoload.register`.

An entry point that cannot be loaded makes `import torch` itself fail, so it must not be lost while the metadata that
names it stays. This file is copied beside the metadata also by an editable install, whose package stays in its source
folder (`[[tool.scikit-build.generate]]` in pyproject.toml; so no dollar sign may stand here). Without that folder it
warns, and torch goes on.
"""

__all__ = ["register"]


def register() -> None:
    """Register laconic's backends with torch; warns, and registers nothing, where laconic cannot be imported."""
    try:
        from laconic import autoload

        autoload.register()
    except Exception as error:  # whatever it is: programs that only use torch do not pay for it
        import warnings

        warnings.warn(
            f"laconic is installed, but cannot be imported ({type(error).__name__}: {error}): torch goes on without "
            "the backends of laconic. If the folder it was installed from was moved or removed, run `pip install -e .` "
            "where it is now, or `pip uninstall laconic`",
            stacklevel=1,
        )
