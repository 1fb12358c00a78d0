"use strict";
// Numbers as the page writes them, and round ticks for axes: what the scripts below share.
const written = (value, digits = 4) => {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "n/a" : value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en").replaceAll(",", Math.abs(value) < 1e4 ? "" : "\u202f").replace("-", "−");
  const size = Math.floor(Math.log10(Math.abs(value)));
  const text = size < -4 || size >= digits ? value.toExponential(digits - 1) : value.toPrecision(digits);
  const [mantissa, power] = text.split("e");
  const short = (mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa).replace("-", "−");
  if (power === undefined) return short;
  const raised = [...String(Math.abs(power))].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  return `${short}×10${power < 0 ? "⁻" : ""}${raised}`;
};

const linearTicks = (low, high, most = 6) => {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  for (const factor of [1, 2, 5, 10, 20]) {
    const step = factor * power;
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    if (last - first < most) return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
  }
  return [low, high];
};

const logTicks = (low, high) => {
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) powers.push(power);
  const inside = (tick) => tick >= low && tick <= high;
  const fine = powers.flatMap((power) => [1, 2, 5].map((step) => Number(`${step}e${power}`))).filter(inside);
  if (fine.length <= 6) return fine;
  const every = Math.max(1, Math.floor(powers.length / 5));
  return powers.filter((power) => power % every === 0).map((power) => Number(`1e${power}`)).filter(inside);
};
