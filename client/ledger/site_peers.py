"""Records the other hospitals whose keys a person at this site has compared with them.

`consilium site peers` writes it and the worker reads it before a sealed sum. It refuses keys for a study not consented
to, this site's own name or key, and one key for two sites.
"""

from __future__ import annotations

from client.ledger.site_file import SiteFile
from common.ledger.sealed_records import PeerRecord
from common.peers import Peer


class KeepsPeers(SiteFile):
    """The part of a site's ledger that records with which sites it may take part in a sealed sum."""

    def confirm_peer(self, study_id: str, peer: Peer) -> None:
        """Record that a person compared a peer's key with that hospital, for one study.

        A new key replaces the site's earlier one. No row is added if the key is already confirmed.

        Args:
            study_id: Id of the study.
            peer: The peer's site and key.

        Raises:
            InvalidInput: For a study not consented to, for this site's own name or key, and for a key that is confirmed
                for another site of the study.
        """
        self._note_peer(PeerRecord(study_id, peer.site, peer.key))

    def distrust_peer(self, study_id: str, site: str) -> None:
        """Withdraw a confirmation: this site joins no sealed sum with that peer until its key is confirmed again.

        Args:
            study_id: Id of the study.
            site: Name of the peer's site.
        """
        self._note_peer(PeerRecord(study_id, site, key=""))

    def peers(self, study_id: str) -> dict[str, str]:
        """Return the confirmed keys of a study, including those that other processes recorded meanwhile.

        Args:
            study_id: Id of the study.

        Returns:
            The key in hex by site name.
        """
        return dict(self.books.sealed.peers.get(study_id, {}))

    def _note_peer(self, record: PeerRecord) -> None:
        with self._writing():
            self._books.check_peer(record)
            before = self._books.sealed.peers.get(record.study_id, {}).get(record.site)
            if before != record.key:
                self._append(record)
