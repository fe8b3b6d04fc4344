/* The steps that the report shows: a slider for one of them, two fields for several. */

class StepRange {
  /** Args:
   *   steps: all steps of the page, in order
   *   onChange: called after every change
   */
  constructor(steps, onChange) {
    this.steps = steps;
    this.onChange = onChange;
    this._prepare();
  }

  get first() {
    return numberIn("from", -Infinity);
  }

  get last() {
    return numberIn("to", Infinity);
  }

  showStep(step) {
    const nearest = nearestOf(this.steps, step);
    this._set(nearest, nearest);
    this.onChange();
  }

  _set(from, to) {
    byId("from").value = from;
    byId("to").value = to;
    this._follow();
  }

  /** The slider stands at the first shown step. */
  _follow() {
    const from = numberIn("from", this.steps[0]);
    const at = this.steps.findIndex((step) => step >= from);
    byId("step").value = at < 0 ? this.steps.length - 1 : at;
  }

  _prepare() {
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    byId("step").max = this.steps.length - 1;
    const later = delayed(this.onChange);
    for (const id of ["from", "to"]) {
      Object.assign(byId(id), { min: first, max: last });
      byId(id).addEventListener("input", () => {
        this._follow();
        later();
      });
    }
    this._set(last, last);
    byId("step").addEventListener("input", () => this.showStep(this.steps[Number(byId("step").value)]));
    byId("all-steps").addEventListener("click", () => {
      this._set(first, last);
      this.onChange();
    });
  }
}
