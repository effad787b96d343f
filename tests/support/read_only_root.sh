# Runs a command as a container of deploy/ does: user 1000 without capabilities, a root that nobody can
# write to, a network of its own, and the folders of a pod at their places.
#
#   read_only_root.sh ROOT MODELS COMMAND...
#
# ROOT is an empty folder for the mounts. Needs user namespaces.
set -eu
root=$1 models=$2
shift 2
if [ "${INSIDE:-}" != yes ]; then
    INSIDE=yes exec unshare --user --map-root-user --mount --net -- sh -eu "$0" "$root" "$models" "$@"
fi
# As `ip link set lo up`, which is not everywhere.
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 0x41))'
mount -t tmpfs -o mode=755 none "$root"
for path in /*; do
    name=${path#/}
    case $name in
    models | cache | scratch | tmp | lost+found) continue ;;
    esac
    if [ -L "$path" ]; then
        cp -P "$path" "$root/$name"
    elif [ -d "$path" ]; then
        mkdir "$root/$name"
        mount --rbind "$path" "$root/$name"
    fi
done
mkdir "$root/models" "$root/cache" "$root/scratch" "$root/tmp"
mount --rbind "$models" "$root/models"
for name in cache scratch tmp; do
    mount -t tmpfs -o mode=1777 none "$root/$name"
done
for path in "$root" "$root"/*; do
    case ${path#"$root"/} in
    cache | scratch | tmp | dev | proc | sys) continue ;;
    esac
    if [ ! -L "$path" ]; then
        mount -o remount,bind,ro "$path"
    fi
done
# Not chroot: nobody may make a namespace of users in one.
cd "$root"
pivot_root . .
umount -l .
cd /
exec unshare --user --map-user=1000 --map-group=1000 -- "$@"
