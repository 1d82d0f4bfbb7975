#!/bin/sh
# Any program can be a job: this one estimates pi in a shell. It follows docs/guides/any-command.md.
#
#   swell run --command --workers 1:3 --name pi -- examples/any_command.sh 300
#   swell submit --command -- examples/any_command.sh 300
#
# Each worker counts its share of a step's points; rank 0 adds the shares up, saves, and says how far it is.
# A point depends on its number and not on who looks at it, so the result is the same on any number of workers.
steps=${1:-300} points=${2:-3000}

count() { # step, first point, distance to the next: how many of these points are inside the circle
    awk -v step="$1" -v from="$2" -v by="$3" -v points="$points" 'BEGIN {
        for (i = from; i < points; i += by) {
            x = (step * points + i) * 0.7548776662466927; y = (step * points + i) * 0.5698402909980532
            x -= int(x); y -= int(y)
            inside += x * x + y * y < 1
        }
        print inside + 0
    }'
}
put() { echo "$2" > "$1.$SWELL_RANK.new" && mv "$1.$SWELL_RANK.new" "$1"; } # whole or not at all
leave_if_asked() { if [ -e "$SWELL_SAVE_NOW" ]; then exit 75; fi; }           # signal 1: save now

step=0 inside=0
if [ -f "$SWELL_STATE/saved" ]; then read -r step inside < "$SWELL_STATE/saved"; fi # signal 2: where to resume
while [ "$step" -lt "$steps" ]; do
    share="$SWELL_STATE/share.$SWELL_GENERATION.$step"
    put "$share.$SWELL_RANK" "$(count "$step" "$SWELL_RANK" "$SWELL_WORKERS")"     # signal 3: how many workers
    step=$((step + 1))
    if [ "$SWELL_RANK" -eq 0 ]; then
        rank=0
        while [ "$rank" -lt "$SWELL_WORKERS" ]; do
            until [ -f "$share.$rank" ]; do leave_if_asked; sleep 0.02; done
            read -r part < "$share.$rank"
            inside=$((inside + part)) rank=$((rank + 1))
        done
        put "$SWELL_STATE/saved" "$step $inside"
        rm -f "$share".*
        echo "swell: progress=$step of=$steps"
    else
        until read -r reached _ < "$SWELL_STATE/saved" && [ "$reached" -ge "$step" ]; do
            leave_if_asked
            sleep 0.02
        done 2> /dev/null
    fi
    leave_if_asked
done
if [ "$SWELL_RANK" -eq 0 ]; then
    awk -v inside="$inside" -v all="$((steps * points))" 'BEGIN { printf "pi is about %.6f\n", 4 * inside / all }'
fi
