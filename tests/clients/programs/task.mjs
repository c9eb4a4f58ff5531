// What every program asks, and how it says what came back.

export const [kind, url, model] = process.argv.slice(2);
export const question = "Tom has 12 pens. Tom sells 5 pens. How many pens does Tom have now?";
export const take = ({ have, sold }) => String(have - sold);

export function say(cameBack) {
  console.log(JSON.stringify(cameBack));
}
