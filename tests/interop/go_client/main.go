// Calls methods by name with messages that are given and printed in hexadecimal.
//
// Each line of the file is: method, deadline ("-" for none, "cancel" after the first message),
// metadata ("-", or key=value,...), message; each line of the output: code, text of the status,
// messages.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// raw is the codec of bytes that are messages already.
type raw struct{}

func (raw) Name() string                          { return "proto" }
func (raw) Marshal(message any) ([]byte, error)   { return *message.(*[]byte), nil }
func (raw) Unmarshal(data []byte, into any) error { *into.(*[]byte) = data; return nil }

func call(conn *grpc.ClientConn, method, deadline, pairs, message string) string {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if duration, err := time.ParseDuration(deadline); err == nil {
		ctx, cancel = context.WithTimeout(ctx, duration)
		defer cancel()
	}
	if pairs != "-" {
		for _, pair := range strings.Split(pairs, ",") {
			key, value, _ := strings.Cut(pair, "=")
			ctx = metadata.AppendToOutgoingContext(ctx, key, value)
		}
	}
	request, _ := hex.DecodeString(message)
	description := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := conn.NewStream(ctx, description, method)
	answers := []string{}
	if err == nil {
		err = stream.SendMsg(&request)
	}
	if err == nil || err == io.EOF {
		stream.CloseSend()
		for {
			var answer []byte
			if err = stream.RecvMsg(&answer); err != nil {
				break
			}
			answers = append(answers, hex.EncodeToString(answer))
			if deadline == "cancel" {
				cancel()
			}
		}
	}
	if err == io.EOF {
		err = nil
	}
	return fmt.Sprintf("%s\t%s\t%s", status.Code(err), status.Convert(err).Message(), strings.Join(answers, ","))
}

func main() {
	size := grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(64<<20))
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()), size)
	if err != nil {
		panic(err)
	}
	file, err := os.Open(os.Args[2])
	if err != nil {
		panic(err)
	}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		part := strings.Split(lines.Text(), "\t")
		fmt.Println(call(conn, part[0], part[1], part[2], part[3]))
	}
}
