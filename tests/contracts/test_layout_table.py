from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.contracts.layout_contract import PATIENTS, LayoutContract, save


class TestTable(LayoutContract):
    name = "table"

    def lay(self, folder: Path, cases: Mapping[str, np.ndarray]) -> dict[str, Path]:
        rows, images = ["case_id,patient_id,image,label"], {}
        for case, label in cases.items():
            images[case] = save(folder / f"{case}.nii.gz", label + 10)
            save(folder / "drawn" / f"{case}.nii.gz", label)
            rows.append(f"{case},{PATIENTS[case]},{case}.nii.gz,drawn/{case}.nii.gz")
        (folder / "cases.csv").write_text("\n".join(rows) + "\n")
        return images
