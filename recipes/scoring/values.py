"""Values of texts against those of the rows: mean absolute and squared error, and Pearson's correlation."""

import numpy as np

from ..errors import UserError
from ..tokens.labelled import checked_label
from .kinds import Job, Kind
from .labels import logits_of, numbered, tokens_of
from .score import Score
from .statistics import ByRow

_LARGEST = 1e150
# Of what heads give for the same text in several batches, relative.
_ROUNDING = 1e-5


def measure(job: Job) -> list[Score]:
    """Figures of what the head gives, in the units of the labels.

    Raises:
        UserError: a row whose label is no number, or a very large one, or a head that gives several numbers.
    """
    count = job.subject.model.config.num_labels
    if count != 1:
        raise UserError(f"{job.subject.path}: gives {count} numbers for a text, and rows have one: nothing is measured")
    rows = []
    for number, row in numbered(job):
        try:
            rows.append(row | {"label": checked_label(row["label"], "regression")})
        except UserError as error:
            raise UserError(
                f"row {number}: the model gives a number, and the label {row['label']!r} is none"
            ) from error
    data = tokens_of(job, rows, "regression")
    wanted, given = np.array(data.dataset["labels"], dtype=np.float64), np.zeros(len(data.dataset))
    for places, logits in logits_of(job, data.dataset["input_ids"]):
        given[places] = logits[:, 0].cpu().numpy()
    details, found, errors = {"texts_cut": data.report.truncated}, [], given - wanted
    if abs(errors).max() > _LARGEST:
        raise UserError(f"a label is {abs(errors).max():.3g} away from what the model gives, too far to be squared")
    for name, title, values in (("mae", "mean absolute error", abs(errors)), ("mse", "mean squared error", errors**2)):
        if name in job.wanted:
            found.append(Score.of(title, ByRow.of_values(values), better="lower", details=details))
    if "pearson" in job.wanted:
        if not np.ptp(wanted):
            job.tell("correlation: left out: the labels of the rows do not vary")
        elif np.ptp(given) <= _ROUNDING * abs(given).max():
            job.tell("correlation: left out: what the model gives does not vary")
        else:
            # Without mean and width the correlation is the same, and sums of squares round less.
            x, y = map(_standard, (wanted, given))
            by_row = ByRow(np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], 1), "pearson")
            found.append(Score.of("Pearson correlation", by_row, details=details))
    if not found:
        raise UserError("no figure is left: a correlation needs labels and values that vary")
    return found


def _standard(side: np.ndarray) -> np.ndarray:
    """With mean 0 and width 1, also where squares of the values would be 0."""
    side = side / abs(side).max()
    side = (side - side.mean()) / np.ptp(side)
    return side / side.std()


KIND = Kind({"regressor": ("classification",)}, ("mae", "mse", "pearson"), measure)
