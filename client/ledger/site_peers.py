"""The peers of a site on record: whose keys a person here has compared with the hospitals themselves."""

from __future__ import annotations

from client.ledger.site_file import SiteFile
from common.ledger.sealed_records import PeerRecord
from common.peers import Peer


class KeepsPeers(SiteFile):
    """The part of a site's ledger that knows with whom codes may be added up."""

    def confirm_peer(self, study_id: str, peer: Peer) -> None:
        """Put on record that ``peer.key`` was compared with the hospital itself, for one study. Confirmed: no row.

        A new key of a site takes the place of the old one. InvalidInput for a study not consented to, this site's own
        name or key, and a key that is confirmed for another site of the study.
        """
        self._note_peer(PeerRecord(study_id, peer.site, peer.key))

    def distrust_peer(self, study_id: str, site: str) -> None:
        """Take a confirmation back: nothing is added up with that site until it is confirmed anew."""
        self._note_peer(PeerRecord(study_id, site, key=""))

    def peers(self, study_id: str) -> dict[str, str]:
        """The confirmed key (hex) of each peer in a study; with what other processes wrote since."""
        self._catch_up()
        return dict(self._books.sealed.peers.get(study_id, {}))

    def _note_peer(self, record: PeerRecord) -> None:
        with self._writing():
            self._books.check_peer(record)
            before = self._books.sealed.peers.get(record.study_id, {}).get(record.site)
            if before != record.key:
                self._append(record)
