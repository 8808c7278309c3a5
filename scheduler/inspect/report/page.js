// Filters and sorts the table of records, steps from record to record as it shows them, unpacks the pictures of what is
// open, and copies commands.
"use strict";
{
  const table = document.getElementById("records");
  const rows = [...table.tBodies[0].rows];
  const form = document.getElementById("filters");
  const words = document.getElementById("words");
  const menus = [...form.querySelectorAll("select")];
  const text = new Map(rows.map((row) => [row, `${row.textContent} ${row.dataset.words}`.toLowerCase()]));
  const shown = () => [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const address = (row) => row.querySelector("a").hash;

  // Of a cell: a number or a date where it says one, else its words.
  const valued = (row, column) => {
    const cell = row.cells[column];
    const number = cell.querySelector("data");
    if (number) return number.value === "" ? NaN : Number(number.value);
    const time = cell.querySelector("time");
    return time ? time.dateTime : cell.textContent;
  };
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));
  const missing = (value) => value === "" || Number.isNaN(value);

  const sort = (head, direction) => {
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
    const column = head.cellIndex;
    const sign = direction === "ascending" ? 1 : -1;
    const keys = new Map(rows.map((row) => [row, valued(row, column)]));
    const places = new Map(rows.map((row, place) => [row, place]));
    // What has no value comes last in either order; equals stay as they were written.
    rows.toSorted((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y) || places.get(a) - places.get(b);
      return sign * compare(x, y) || places.get(a) - places.get(b);
    }).forEach((row) => table.tBodies[0].append(row));
    step();
  };

  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const named = menus.every((menu) => !menu.value || `=${row.dataset[menu.dataset.field]}` === menu.value);
      row.hidden = !(named && wanted.every((word) => text.get(row).includes(word)));
    }
    count();
    step();
  };

  // How many there are, and how they stand against XLA on the geometric mean.
  const count = () => {
    const left = shown();
    const gains = left.map((row) => row.querySelector(".gain data").value).filter(Boolean).map(Number);
    const mean = Math.exp(gains.reduce((sum, gain) => sum + Math.log(gain), 0) / gains.length);
    const records = `${rows.length} record${rows.length === 1 ? "" : "s"}`;
    const all = left.length === rows.length ? records : `${left.length} of ${records}`;
    document.getElementById("count").value = gains.length ? `${all}, ${mean.toFixed(3)}x XLA in the geometric mean` : all;
    const none = document.getElementById("none");
    if (none) none.hidden = left.length > 0;
  };

  // The links of the record that is open lead to those before and after it in the table.
  const step = () => {
    const open = document.querySelector("article:target");
    const row = open && rows.find((other) => address(other) === `#${open.id}`);
    for (const other of rows) other.classList.toggle("seen", other === row);
    if (!open) return;
    const left = shown();
    const place = left.indexOf(row);
    for (const [name, other] of [["previous", left[place - 1]], ["next", left[place + 1]]]) {
      const link = open.querySelector(`nav .${name}`);
      link.hidden = place < 0 || !other;
      if (other) link.href = address(other);
    }
  };

  // Pictures are gzipped SVG.
  const unpack = async (image) => {
    const bytes = Uint8Array.from(atob(image.dataset.svg), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    image.src = URL.createObjectURL(new Blob([await new Response(stream).text()], { type: "image/svg+xml" }));
  };
  const draw = () => {
    for (const image of document.querySelectorAll("article:target img:not([src]), details[open] img:not([src])")) {
      unpack(image);
    }
  };
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => draw());

  let from = 0;
  let listed = !document.querySelector("article:target");
  addEventListener("scroll", () => { if (listed) from = scrollY; }, { passive: true });
  addEventListener("hashchange", () => {
    const open = document.querySelector("article:target");
    listed = !open;
    step();
    draw();
    scrollTo(0, open ? 0 : from);
    document.title = open ? open.querySelector("h2").textContent : document.querySelector("h1").textContent;
  });

  for (const head of table.tHead.rows[0].cells) {
    const button = head.querySelector("button");
    button.addEventListener("click", () => {
      const first = button.dataset.first;
      const other = first === "ascending" ? "descending" : "ascending";
      sort(head, head.getAttribute("aria-sort") === first ? other : first);
    });
  }
  form.addEventListener("input", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "copied";
    });
  }
  form.hidden = false;
  filter();
  addEventListener("load", () => { step(); draw(); });  // only now is it known which record an address names
}
