// Bundles web/src into src/swell/web: a page, a script, a style sheet and an icon. No hashes in names: the
// server sends `no-store`, and a build of the same sources is the same to the byte.
import { build } from "esbuild";
import { copyFileSync, mkdirSync } from "node:fs";

const out = "../src/swell/web";
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: "src/main.ts" },
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  outdir: out,
  legalComments: "eof",
  loader: { ".css": "css" },
  banner: { js: "/* Built from web/ by npm run build: do not edit. Contains uPlot (MIT, see LICENSE.uPlot). */", css: "/* Built from web/ by npm run build: do not edit. */" },
});
copyFileSync("node_modules/uplot/LICENSE", `${out}/LICENSE.uPlot`);
for (const name of ["index.html", "icon.svg"]) copyFileSync(`src/${name}`, `${out}/${name}`);
