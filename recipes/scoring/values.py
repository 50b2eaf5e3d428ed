"""Values of texts against those of the rows: mean absolute and squared error, and Pearson's correlation."""

import numpy as np

from ..errors import UserError
from ..tokens.labelled import checked_label
from .kinds import Job, Kind
from .labels import logits_of, numbered, tokens_of
from .score import Score
from .statistics import ByRow


def measure(job: Job) -> list[Score]:
    """Figures of what the head gives, in the units of the labels.

    Raises:
        UserError: a row whose label is no number.
    """
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
    for name, title, values in (("mae", "mean absolute error", abs(errors)), ("mse", "mean squared error", errors**2)):
        if name in job.wanted:
            found.append(Score.of(title, ByRow.of_values(values), better="lower", details=details))
    if "pearson" in job.wanted:
        # The mean is taken out first: the correlation is the same, and squares of large values round less.
        x, y = wanted - wanted.mean(), given - given.mean()
        by_row = ByRow(np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], 1), "pearson")
        if np.isnan(by_row.value):
            still = "the labels of the rows do" if not x.any() else "what the model gives does"
            job.tell(f"correlation: left out: {still} not vary")
        else:
            found.append(Score.of("Pearson correlation", by_row, details=details))
    return found


KIND = Kind({"regressor": ("classification",)}, ("mae", "mse", "pearson"), measure)
