/* Filters: which groups are shown, and in which order. */

const SEARCH_DELAY_MS = 200;

class Filters {
  /** Args:
   *   steps: has the first and the last step that are shown, in `first` and `last`
   *   onChange: called after every change
   */
  constructor(steps, onChange) {
    this.steps = steps;
    this.run = null;
    this._prepare(onChange);
  }

  setRun(run) {
    this.run = run;
    const [chosen, tasks] = [byId("task").value, [...new Set(run.groups.map((group) => group.task))].sort()];
    const options = [["", "all tasks"], ...tasks.map((task) => [task, task])];
    byId("task").replaceChildren(...options.map(([value, textContent]) => make("option", { value, textContent })));
    byId("task").value = tasks.includes(chosen) ? chosen : "";
    byId("task-field").hidden = tasks.length < 2;
  }

  get wanted() {
    return byId("search").value.toLowerCase();
  }

  get order() {
    return byId("order").value;
  }

  /** Groups that match, each with the matching sequences in `matching`, by their place. */
  async select(isCurrent) {
    const { first, last } = this.steps;
    const [low, high] = [numberIn("low", -Infinity), numberIn("high", Infinity)];
    const [task, wanted] = [byId("task").value, this.wanted];
    const found = [];
    for (const group of this.run.groups) {
      if (group.step < first || group.step > last || (task && group.task !== task)) continue;
      let matching = [...group.sequences.keys()].filter((place) => {
        const [score] = group.sequences[place];
        return score === null || (score >= low && score <= high);
      });
      if (wanted && matching.length) {
        const [prompt, ...completions] = await this.run.searchable(group);
        if (!isCurrent()) return null;
        if (!prompt.includes(wanted)) matching = matching.filter((place) => completions[place].includes(wanted));
      }
      if (matching.length) found.push({ ...group, matching: ordered(matching, group, this.order) });
    }
    return sorted(found, this.order);
  }

  _prepare(onChange) {
    const later = delayed(onChange);
    for (const id of ["search", "low", "high"]) byId(id).addEventListener("input", later);
    for (const id of ["task", "order"]) byId(id).addEventListener("input", onChange);
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }
}

/** Calls it when one has stopped typing. */
function delayed(call) {
  let waiting = 0;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(call, SEARCH_DELAY_MS);
  };
}

function numberIn(id, otherwise) {
  const { value } = byId(id);
  return value === "" ? otherwise : Number(value);
}

const SCORE = 0;
const ADVANTAGE = 1;
const size = (sequence) => Math.abs(sequence[ADVANTAGE] ?? 0);

/* Each order compares sequences; a group stands where its first sequence stands. */
const ORDERS = {
  worst: (left, right) => left[SCORE] - right[SCORE],
  best: (left, right) => right[SCORE] - left[SCORE],
  advantage: (left, right) => size(right) - size(left),
};

function ordered(places, group, order) {
  if (!(order in ORDERS)) return places;
  return places.sort((left, right) => ORDERS[order](group.sequences[left], group.sequences[right]));
}

function sorted(groups, order) {
  if (!(order in ORDERS)) return groups;
  const first = (group) => group.sequences[group.matching[0]];
  const whole = { worst: 1, best: -1 }[order] ?? 0;
  return groups.sort((left, right) =>
    ORDERS[order](first(left), first(right)) || whole * (meanScore(left) - meanScore(right)));
}

function meanScore(group) {
  return group.sequences.reduce((sum, sequence) => sum + sequence[SCORE], 0) / group.sequences.length;
}
