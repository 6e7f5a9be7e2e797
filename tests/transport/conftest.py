"""Which transports the contract is held against: `--transport NAME` for those that must run, else all that can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.transport.kinds import KINDS, Kind
from tests.transport.site import Site


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "hold the contract against this transport alone, or against these"
    parser.addoption("--transport", choices=sorted(KINDS), action="append", default=[], help=told)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        names = metafunc.config.getoption("--transport", []) or list(KINDS)
        metafunc.parametrize("kind", [KINDS[name] for name in names], ids=names, scope="session")


@pytest.fixture(scope="session", autouse=True)
def _can_run(request: pytest.FixtureRequest) -> None:
    """Placed first so that a chosen transport that cannot run fails at once."""
    for chosen in request.config.getoption("--transport", []):
        if reason := KINDS[chosen].why_not():
            pytest.exit(f"--transport {chosen}: {reason}", returncode=1)


@pytest.fixture
def new_site(kind: Kind) -> Iterator[Callable[..., Site]]:
    """Makes sites; all are closed at the end."""
    if reason := kind.why_not():
        pytest.skip(reason)
    made: list[Site] = []

    def make(*arguments: object, **named: object) -> Site:
        made.append(Site(kind, *arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return new_site()


@pytest.fixture
def guarded_site(kind: Kind, new_site: Callable[..., Site]) -> Site:
    """For tests of rights that can be taken away."""
    if not kind.guards:
        pytest.skip("memory that is shared by its name has no keys")
    return new_site()
