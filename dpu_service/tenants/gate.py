"""From a request's header to the tenant's account."""

from __future__ import annotations

import hmac

from dpu_service.tenants.account import Account
from dpu_service.tenants.keys import digest, presented_key
from dpu_service.tenants.page import CounterPage, create
from dpu_service.tenants.tenant import Limits, Tenant


class KeyMissingError(Exception):
    """No key was presented."""


class KeyUnknownError(Exception):
    """A key that is nobody's."""


class Gate:
    """Knows every tenant's keys by their digests.

    Args:
        page: counters that the workers share.
        worker: row of this one.
    """

    def __init__(self, page: CounterPage, worker: int) -> None:
        self._page = page
        self._worker = worker
        self._accounts: dict[str, Account] = {}
        self._by_digest: dict[bytes, Account] = {}
        self._anybody: Account | None = None

    @classmethod
    def open_to_all(cls) -> Gate:
        """Without keys: one nameless tenant without limits."""
        gate = cls(CounterPage(create(1), 1), 0)
        gate._anybody = Account(Tenant(name="", slot=0, digests=[], limits=Limits(), metrics=True), gate._page, 0)
        return gate

    def set_tenants(self, tenants: list[Tenant]) -> None:
        """These and no others. What runs goes on; limits of those that stay keep their level."""
        accounts = {}
        for tenant in tenants:
            account = self._accounts.get(tenant.name)
            if account is None:
                account = Account(tenant, self._page, self._worker)
            else:
                account.update(tenant)
            accounts[tenant.name] = account
        self._accounts = accounts
        self._by_digest = {one: accounts[tenant.name] for tenant in tenants for one in tenant.digests}

    def account(self, authorization: bytes | None) -> Account:
        """Whose request this is. The time it takes says nothing of any key: digests are looked up and compared.

        Raises:
            KeyMissingError: no key is given.
            KeyUnknownError: it is not one of ours.
        """
        if self._anybody is not None:
            return self._anybody
        key = presented_key(authorization)
        if key is None:
            raise KeyMissingError
        found = digest(key)
        account = self._by_digest.get(found)
        if account is None or not any(hmac.compare_digest(found, one) for one in account.tenant.digests):
            raise KeyUnknownError
        return account

    def tick(self) -> None:
        """Once a second."""
        for account in self._accounts.values():
            account.tick()
