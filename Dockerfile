# docker build -t steelyard . — one static binary and nothing else.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN make build

FROM scratch
COPY --from=build /src/steelyard /steelyard
ENTRYPOINT ["/steelyard"]
CMD ["run"]
